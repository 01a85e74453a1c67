// Stands in for the class of that name in hadoop-yarn-server-web-proxy, which skein's application master wants and the
// jars of pyspark 4 lack. It lets everything pass.

package org.apache.hadoop.yarn.server.webproxy.amfilter;

import java.io.IOException;
import javax.servlet.Filter;
import javax.servlet.FilterChain;
import javax.servlet.FilterConfig;
import javax.servlet.ServletException;
import javax.servlet.ServletRequest;
import javax.servlet.ServletResponse;

public class AmIpFilter implements Filter {
  public void init(FilterConfig config) {}

  public void destroy() {}

  public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
      throws IOException, ServletException {
    chain.doFilter(request, response);
  }
}
